"""How a run stands and what it cost: state, goodput, recoveries, summary."""
