"""The public names with their types, for type checkers; `__init__.py` loads each on first use."""

from .allocation.planner import Planner as Planner
from .allocation.recipe import Settings as Settings
from .allocation.recipe import make_settings as make_settings
from .budget import Budget as Budget
from .calibration.images import calibration_and_held_out as calibration_and_held_out
from .calibration.images import prepare as prepare
from .elastic.folder import Elastic as Elastic
from .errors import SnapvitError as SnapvitError
from .family.folder import read_family as read_family
from .family.loaded import load_family as load_family
from .family.manifest import Manifest as Manifest
from .model.anatomy import Anatomy as Anatomy
from .model.plan import Plan as Plan
from .model.ranking import Ranking as Ranking
from .prune.correct.refit import refit as refit
from .prune.elastic_vit import ElasticViT as ElasticViT
from .prune.import_scores import import_scores as import_scores
from .prune.importance_scores import ElasticImportanceScores as ElasticImportanceScores
from .prune.models.load import as_model as as_model
from .prune.models.load import load_model as load_model
from .prune.models.load import save_model as save_model
from .prune.models.slicing import shrink as shrink
from .prune.pack import pack as pack
from .prune.rank.rank import rank as rank
from .serving.session import ElasticSession as ElasticSession
from .target import Target as Target
from .workflows.export import Request as Request
from .workflows.export import export as export

__version__: str
__all__: list[str]
