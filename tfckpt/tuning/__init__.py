"""Plans settled by measuring them: `tfckpt.tune`."""
