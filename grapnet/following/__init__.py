"""What follows the edits of a net: optimizers, averaged copies and processes."""
