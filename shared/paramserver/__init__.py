"""paramserver: a parameter server for Python, through plain REST or this client.

>>> import paramserver as ps
>>> client = ps.connect()                      # PARAMSERVER_URL, default http://127.0.0.1:8700
"""

__version__ = "0.1.0"
