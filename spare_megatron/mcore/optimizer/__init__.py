"""Adam with its state replicated, divided over lanes, or stacked over groups; Muon with its state replicated."""
