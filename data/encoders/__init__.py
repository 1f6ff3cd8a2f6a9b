"""From a record to tokens and labels: one file per kind of data, and the table that names them."""
