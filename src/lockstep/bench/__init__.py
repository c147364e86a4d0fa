"""`lockstep bench`, and the models, loops and timing that the scripts in the repository's bench/ folder also use."""
