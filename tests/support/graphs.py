"""Random graphs and schedules, seeded; hypothesis draws the seed so that failures shrink to it."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from tfckpt.ir.costgraph import BACKWARD, FORWARD, UPDATE, CostGraph, Storage, Vertex

seeds = st.integers(0, 2**32 - 1)


@st.composite
def paper_graphs(draw, largest: int = 7, smallest_bytes: int = 0):
    """(bytes, time, edges): small costs, any DAG whose index order is topological."""
    count = draw(st.integers(1, largest))
    pairs = [(u, v) for v in range(count) for u in range(v)]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    cost = st.lists(st.integers(smallest_bytes, 6), min_size=count, max_size=count)
    time = st.lists(st.integers(0, 6), min_size=count, max_size=count)
    return draw(cost), draw(time), sorted(edges)


def random_paper_graph(seed: int, count: int, density: float = 0.3):
    """(bytes, time, edges) of `count` vertices, with no zero costs."""
    rng = random.Random(seed)
    edges = [(u, v) for v in range(count) for u in range(v) if rng.random() < density]
    return ([rng.randint(1, 9) for _ in range(count)], [rng.randint(1, 9) for _ in range(count)],
            edges)


def random_joint_graph(seed: int, count: int = 12, nested: bool = False) -> CostGraph:
    """Vertices of all regions that use every feature the simulator knows.

    Where nested, some of the backward is forward for a second gradient, and may run again.
    """
    rng = random.Random(seed)
    vertices: list[Vertex] = []
    storages: list[Storage] = []
    for index in range(count):
        third = 3 * index // count
        region = (FORWARD, BACKWARD, UPDATE)[third]
        if nested and region == BACKWARD and rng.random() < 0.5:
            region = FORWARD
        reads = tuple(sorted(rng.sample(range(len(storages)), min(len(storages),
                                                                    rng.randint(0, 3)))))
        writes = tuple(range(len(storages), len(storages) + rng.randint(0, 2)))
        for storage in writes:
            storages.append(Storage(f"s{storage}", rng.choice((1, 2, 2, 4)), index,
                                    fetched=rng.random() < 0.1))
        pairs = [(w, r) for w in writes for r in reads if rng.random() < 0.5]
        rng.shuffle(pairs)
        vertices.append(Vertex(
            f"v{index}", region, float(rng.randint(0, 5)), reads=reads, writes=writes,
            after=(rng.randrange(index),) if index and rng.random() < 0.2 else (),
            reuses=tuple(pairs), recomputable=region == FORWARD and rng.random() < 0.8,
            workspace=rng.choice((0, 0, 3)),
            donates=tuple(r for r in reads if region == UPDATE and rng.random() < 0.4)))
    return CostGraph(tuple(vertices), tuple(storages), name=f"random {seed}")


def random_schedule(graph: CostGraph, seed: int, repeats: int = 6):
    """Return a random topological order of every vertex with repeats of recomputable ones mixed in.
    """
    rng = random.Random(seed)
    ran = [0] * len(graph.vertices)
    schedule = []
    while not all(ran):
        ready = [v for v, count in enumerate(ran)
                 if not count and all(ran[p] for p in graph.predecessors[v])]
        again = [v for v, count in enumerate(ran) if count and graph.vertices[v].recomputable]
        if again and repeats and rng.random() < 0.4:
            vertex = rng.choice(again)
            repeats -= 1
        else:
            vertex = rng.choice(ready)
        schedule.append((vertex, ran[vertex]))
        ran[vertex] += 1
    return tuple(schedule)


def random_execution(graph: CostGraph, schedule, seed: int) -> list[int]:
    """Another order of the same steps in which every step still finds what it was bound to."""
    rng = random.Random(seed)
    waits: list[set[int]] = []
    for position, (vertex, _) in enumerate(schedule):
        producers = {graph.storages[s].producer for s in graph.vertices[vertex].reads}
        waits.append({max(q for q in range(position) if schedule[q][0] == producer)
                      for producer in producers})
    order: list[int] = []
    while len(order) < len(schedule):
        ready = [p for p in range(len(schedule)) if p not in order and waits[p] <= set(order)]
        order.append(rng.choice(ready))
    return order


def residual_network(blocks: int, seed: int = 0):
    """(bytes, time, edges) shaped like a ResNet: blocks of six nodes around a skip connection."""
    rng = random.Random(seed)
    bytes_, time, edges = [1000], [5], []

    def add(size, cost, needs):
        bytes_.append(size)
        time.append(cost)
        edges.extend((need, len(bytes_) - 1) for need in needs)
        return len(bytes_) - 1

    last = 0
    for _ in range(blocks):
        size, node = rng.randint(200, 1000), last
        for _ in range(2):
            node = add(size, 10, [node])
            node = add(size, 1, [node])
        last = add(size, 1, [last, node])
        last = add(size, 1, [last])
    return bytes_, time, edges
