"""Files, processes and devices: what the other packages need of the machine they run on."""
