"""What a block's bytes look like below the device: raw, packed without loss, or quantized."""
