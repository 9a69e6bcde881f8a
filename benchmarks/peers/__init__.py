"""Other systems, run by their own interpreters beside ours."""
