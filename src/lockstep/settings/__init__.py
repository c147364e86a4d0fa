"""`lockstep settings`: list the settings of a config, with their defaults and what they do."""
