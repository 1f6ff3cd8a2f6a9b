"""LoRA, freezing, and the folders of peft."""
