"""Files, processes and devices of the machine, as far as several packages use them."""
