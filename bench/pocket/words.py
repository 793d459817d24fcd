"""The words of the micro-world: nearly every one is a single token."""

NAMES: tuple[str, ...] = (
    "Mary",
    "John",
    "Anna",
    "Peter",
    "Emma",
    "David",
    "Lucy",
    "Tom",
    "Sara",
    "Paul",
    "Nora",
    "Ben",
)
NAMES += ("Clara", "Max", "Ella", "Hugo", "Rosa", "Felix", "Ida", "Leo", "Vera", "Oscar", "Julia", "Simon")
PLACES: tuple[str, ...] = ("kitchen", "garden", "office", "bedroom", "hallway", "cellar")
PLACES += ("attic", "library", "garage", "park", "barn", "market")
THINGS: tuple[str, ...] = ("apple", "book", "ball", "key", "lamp", "coin", "hat", "cup", "map", "pen", "rope", "box")
THINGS += ("bag", "basket", "chest", "jar", "ring", "bottle", "drum", "kite", "bucket", "crate", "shell", "clock")
CITIES: tuple[str, ...] = ("Rome", "Paris", "London", "Madrid", "Vienna", "Oslo", "Cairo", "Lima", "Tokyo", "Delhi")
