"""One forward pass: the ragged batch, attention over pages, the target model interface."""
