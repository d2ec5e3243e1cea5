"""Read models of other toolkits and write them as model folders."""
