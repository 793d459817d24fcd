"""What is known of a token or a text: trajectory, repetition, verdict, savings, groundedness."""
