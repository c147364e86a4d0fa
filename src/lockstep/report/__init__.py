"""`lockstep report`: one run, or several compared, as text, JSON or a self-contained HTML page."""
