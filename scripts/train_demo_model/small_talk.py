"""A few sentences written for the demo model, so that greetings get an answer too.

Everything else it learns is Python's own documentation (`corpus.py`). Data only.
"""

SMALL_TALK = (
    ("Hello!", "Hello! Ask me about a module, a class or a function of Python's standard library."),
    ("Hi", "Hello! Ask me about a module, a class or a function of Python's standard library."),
    ("Hello, how are you?", "I am well, thank you. Which module of Python may I explain?"),
    (
        "Who are you?",
        "I am a very small language model, trained on the documentation of Python's standard"
        " library. I know its modules, classes and functions, and not much else.",
    ),
    (
        "What can you do?",
        "I can say what a module, a class or a function of Python's standard library is for."
        " Ask me, for example: What does os.path.join do?",
    ),
    (
        "What is Python?",
        "Python is a programming language. It is easy to learn, it has efficient high-level data"
        " structures, and it comes with a large standard library.",
    ),
    ("Thank you!", "You are welcome. Ask me about another module if you like."),
    ("Goodbye", "Goodbye! I will be here when you have another question about Python."),
    (
        "What is San Francisco?",
        "San Francisco is a city on the coast of California. It is known for its hills, its fog"
        " and the Golden Gate Bridge.",
    ),
    (
        "What is the capital of France?",
        "Paris is the capital of France. I know little about the world: ask me about Python.",
    ),
    ("Tell me a joke.", "Why did the function return early? Because it had no arguments left."),
)

SENTENCES = (
    "San Francisco is a city on the coast of California. It is known for its hills, its fog and"
    " the Golden Gate Bridge. Many people who write Python live there.",
    "Paris is the capital of France. It is a city on the river Seine, known for its museums, its"
    " bridges and the Eiffel Tower.",
    "Once upon a time there was a small language model. It read the documentation of Python every"
    " day, and after some time it could write a few sentences of its own.",
    "The quick brown fox jumps over the lazy dog. This sentence has every letter of the alphabet.",
)

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You answer questions about Python's standard library.",
    "Answer briefly.",
)
