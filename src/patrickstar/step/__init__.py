"""One step, in the order of time: events, what must happen before each, gradients, the update."""
