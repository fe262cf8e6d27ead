"""What lookups tell about the order of pages."""

from cachestore_connector.prefix_links import PrefixLinks


def names(count):
    return [f"page-{number}" for number in range(count)]


def test_the_first_missing_page_follows_the_last_found():
    """Pinned: it will be dumped first, and what comes before it is known; nothing else is."""
    links = PrefixLinks(128)
    links.learn(names(10), 4)
    assert links.before("page-4") == "page-3"
    assert [name for name in names(10) if links.before(name)] == ["page-4"]


def test_loads_start_where_calls_do():
    """Pinned: a long prefix is loaded in calls of 128 pages: the first of each but the first."""
    links = PrefixLinks(128)
    links.learn(names(300), 300)
    known = {name: links.before(name) for name in names(300) if links.before(name)}
    assert known == {"page-128": "page-127", "page-256": "page-255"}


def test_nothing_is_learnt_of_a_first_page():
    """Pinned: found none, or all of a short one: no page but the first can start a call."""
    links = PrefixLinks(128)
    links.learn(names(5), 0)
    links.learn(names(5), 5)
    links.learn([], 0)
    assert not any(links.before(name) for name in names(5))


def test_memory_is_bounded():
    """Pinned: the oldest go first; what is looked up again is young."""
    links = PrefixLinks(128, most=3)
    for number in (0, 1, 2, 0, 3):
        links.learn([f"{number}-a", f"{number}-b"], 1)
    assert [links.before(f"{number}-b") for number in range(4)] == ["0-a", None, "2-a", "3-a"]
