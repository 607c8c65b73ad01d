"""Training of draft heads: recording what a target says and thinks, learning from it, measuring, exporting."""
