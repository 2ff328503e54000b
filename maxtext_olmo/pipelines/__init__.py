"""How it is wired: dataset types, options, resume, and the iterators trainers hold."""
