"""llama.cpp's n-gram strategies."""
