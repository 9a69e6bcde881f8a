"""Which block is where, and what happens to it next. Pure: no I/O, no threads, no clock."""
