"""Speech recognition: Whisper, or an encoder with CTC; whole or with LoRA; scored by its words."""
