"""What the trainer rests on: text into blocks, losses of training under pruning, stages that are done once."""
