"""The catalogue: methods, and the plug-ins of compositions, by name."""

from typing import Any

from ..method import FedAvg, Method
from ..tuning import PrivatePrompt, Tuning
from ..tunings.adapter import Adapter
from ..tunings.bias import Bias
from ..tunings.cocoop import ConditionalContext
from ..tunings.feature_attention import FeatureAttention
from ..tunings.generated import GeneratedContext
from ..tunings.heads import HeadOnly
from ..tunings.lora import Lora
from ..tunings.maple import Maple
from ..tunings.pixels import PixelPrompt
from ..tunings.text import TextContext
from ..tunings.tokens import TokenPrompt, Tokens
from ..tunings.transport import ManyContexts
from .apfl import Apfl
from .atpfl import Atpfl, Tpfl
from .centralised import Centralised
from .classmean import ClassMean
from .dp2fl import Dp2fl
from .dpfpl import DpFpl
from .fedala import FedAla
from .fedamp import FedAmp
from .fedbn import FedBn
from .feddyn import FedDyn
from .fedem import FedEm
from .fedlc import FedLc
from .fedmgp import FedMgp
from .fedmix import FedMix
from .fedmtl import FedMtl
from .fednova import FedNova
from .fedntd import FedNtd
from .fedotp import FedOtp
from .fedpgp import FedPgp
from .fedpha import FedPha
from .fedpr import FedPr
from .fedproto import FedProto
from .fedprox import FedProx
from .fedrod import FedRod
from .fedsa_lora import FedSaLora
from .ffa_lora import FfaLora
from .flexlora import FlexLora
from .kgcoop import KgCoOp
from .local import Local
from .moon import Moon
from .own_model import Ditto
from .perfedavg import PerFedAvg
from .pfedme import PFedMe
from .pfedmoap import PFedMoap
from .pfedpg import PFedPg
from .pfedprompt import PFedPrompt
from .prograd import ProGrad
from .promptfolio import PromptFolio
from .promptsrc import PromptSrc
from .scaffold import Scaffold
from .server_optimizers import FedAdagrad, FedAdam, FedAvgM, FedYogi
from .sgpt import Sgpt
from .shared_body import FedBabu, FedPer, FedRep, LgFedAvg
from .zeroshot import ZeroShot

METHODS: dict[str, type[Method]] = {
    "local": Local,
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "scaffold": Scaffold,
    "feddyn": FedDyn,
    "fednova": FedNova,
    "fedavgm": FedAvgM,
    "fedadagrad": FedAdagrad,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "fedlc": FedLc,
    "fedntd": FedNtd,
    "moon": Moon,
    "perfedavg": PerFedAvg,
    "fedper": FedPer,
    "fedrep": FedRep,
    "lg-fedavg": LgFedAvg,
    "fedbn": FedBn,
    "ditto": Ditto,
    "apfl": Apfl,
    "fedala": FedAla,
    "fedamp": FedAmp,
    "fedproto": FedProto,
    "fedmtl": FedMtl,
    "fedbabu": FedBabu,
    "fedrod": FedRod,
    "pfedme": PFedMe,
    "fedmix": FedMix,
    "fedem": FedEm,
    "fedpr": FedPr,
    "sgpt": Sgpt,
    "tpfl": Tpfl,
    "atpfl": Atpfl,
    "pfedpg": PFedPg,
    "dp2fl": Dp2fl,
    "kgcoop": KgCoOp,
    "prograd": ProGrad,
    "promptfolio": PromptFolio,
    "fedpgp": FedPgp,
    "fedotp": FedOtp,
    "promptsrc": PromptSrc,
    "pfedprompt": PFedPrompt,
    "pfedmoap": PFedMoap,
    "dp-fpl": DpFpl,
    "fedmgp": FedMgp,
    "fedpha": FedPha,
    "ffa-lora": FfaLora,
    "fedsa-lora": FedSaLora,
    "flexlora": FlexLora,
    "zero-shot": ZeroShot,
    "class-mean": ClassMean,
    "centralised": Centralised,
}
# What is tuned instead of all weights: a tuning, and its settings. One rate for all, chosen for heads by
# validation accuracy on photos; methods that have rates of their own keep these.
_SGD = {"lr": 0.01, "momentum": 0.9}
TUNINGS: dict[str, tuple[type[Tuning], dict[str, Any]]] = {
    "head": (HeadOnly, _SGD),
    "vpt": (Tokens, _SGD),
    "vpt-d": (Tokens, {"layers": "all", **_SGD}),
    "promptfl": (TextContext, _SGD),
    "cocoop": (ConditionalContext, _SGD),
    "plot": (ManyContexts, _SGD),
    "tpg": (GeneratedContext, _SGD),
    "fedclip": (FeatureAttention, _SGD),
    "lora": (Lora, _SGD),
    "bias": (Bias, _SGD),
    "adapter": (Adapter, _SGD),
    "maple": (Maple, _SGD),
}
PROMPTS: dict[str, type[PrivatePrompt]] = {"pt": PixelPrompt, "st": TokenPrompt}
FINE_TUNED = {"ft": {"finetune_epochs": 5}}
# A published name for a composition.
ALIASES = {
    "pfedpt": "fedavg+pt",
    "pfedpt-tokens": "fedavg+st",
    "head-tune": "fedavg+head",
    "fedvpt": "fedavg+vpt",
    "fedvpt-d": "fedavg+vpt-d",
    "promptfl": "fedavg+promptfl",
    "cocoop": "fedavg+cocoop",
    "plot": "fedavg+plot",
    "fedtpg": "fedavg+tpg",
    "fedclip": "fedavg+fedclip",
    "fedit": "fedavg+lora",
}
