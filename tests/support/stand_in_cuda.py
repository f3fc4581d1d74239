from .cuda.driver import OPENED as OPENED
from .cuda.driver import Driver as Driver
from .cuda.driver import Result as Result
from .cuda.driver import Workers as Workers
from .cuda.driver import install_driver as install_driver
from .cuda.driver import running as running
