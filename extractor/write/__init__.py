"""From states on the device to whole files and their journal lines."""
