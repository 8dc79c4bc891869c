"""The bug clinic of exercise 16: faulty ring programs ("patients") and the functions that examine them."""
