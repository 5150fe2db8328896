"""The plan store: what was planned for a step is found again by the next process.

`files.py`: the folder, bounded in size; `key.py`: what a plan depends on, as one hash;
`surroundings.py`, `definition.py`: of the process, and of what XLA is asked about; `records.py`,
`texts.py`: what was decided, as JSON and back; `entry.py`: one step's place in the store;
`optimised.py`: Grappler's answers about steps; `pools.py`: what searches have found, for other
batches and budgets.
"""
