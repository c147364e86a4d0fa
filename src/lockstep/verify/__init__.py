"""`lockstep verify`: is the result the same on one process and on several?"""
