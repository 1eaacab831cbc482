"""How a run behaves on machines that are not here: a model of its steps, its faults and its cost, in plain numbers."""
