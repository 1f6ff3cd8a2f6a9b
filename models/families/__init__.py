"""The families that have a file of their own, one each, named after the `model_type` of `transformers`."""
