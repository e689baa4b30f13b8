"""What a run trains on and what must stay equal: corpora, order of samples, terms."""
