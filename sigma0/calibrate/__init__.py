"""From a promise to a threshold: calibration on prompts, tested on prompts set apart."""
