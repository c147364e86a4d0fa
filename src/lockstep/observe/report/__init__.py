"""`lockstep report`: a run, or several compared, as text, as JSON and as one page with plots."""
