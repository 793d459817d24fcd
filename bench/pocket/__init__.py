"""The recipe of the shipped model `pocket`: a micro-world, its tokenizer, training, exit gate, evaluation."""
