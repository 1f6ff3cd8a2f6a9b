"""What a model is trained for: one file per objective, and the table that names them."""
