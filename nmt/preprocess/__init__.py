"""From text of any source and state to a data folder."""
