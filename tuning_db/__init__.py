"""The tuning database: what was measured, on which device, for which problem.

One SQLite file per device slug under the home (``PORTKERN_HOME``, or the user's data folder), plus
the read-only winners that portkern ships, one sorted fact a line. Facts are append-only and keyed
by their content, so files from many machines merge in any order. Nothing here measures anything,
and nothing that goes wrong with a disk stops an op: it costs speed, and one ``DatabaseWarning``.
"""

from portkern.tuning_db.database import Database, ImportReport
from portkern.tuning_db.notices import DatabaseWarning
from portkern.tuning_db.paths import home
from portkern.tuning_db.store import Store
from portkern.tuning_db.winners import winners_only

__all__ = ["Database", "DatabaseWarning", "ImportReport", "Store", "home", "winners_only"]
