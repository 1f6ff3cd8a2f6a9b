"""Images: conversations about pictures, for vision-language models whose tower stays frozen."""
