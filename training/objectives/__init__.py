"""The objectives of training: one file per objective, and the table that names them."""
