"""A sentencepiece BPE as a Hugging Face `tokenizer.json`, so that an exported model loads in transformers as it is.

Both run the same algorithm: again and again merge the neighbouring pair whose result is the best piece, the leftmost of
equals. sentencepiece names a piece's worth by its score, a `tokenizer.json` by a ranked list of the pairs that may be
merged; a trained BPE's pieces stand in the order of their scores, so the list is every way to cut a piece in two, in
the order of the pieces. What is no piece becomes bytes in both.

One difference remains: in a `tokenizer.json` a special token written out in a text ("</s>") is that token, while
sentencepiece takes it for text.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

SPACE = "\u2581"
_BPE = 2  # TrainerSpec.ModelType


def is_convertible(processor: Any) -> bool:
    """Whether `to_tokenizer_json` gives the same ids: a BPE with byte fallback that takes the text as it is."""
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto.FromString(processor.serialized_model_proto())
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    types = {piece.type for piece in model.pieces}
    scores = [piece.score for piece in model.pieces if piece.type == piece.NORMAL]
    return (
        trainer.model_type == _BPE
        and trainer.byte_fallback
        and not trainer.treat_whitespace_as_suffix
        and normalizer.name == "identity"
        and not (normalizer.add_dummy_prefix or normalizer.remove_extra_whitespaces)
        and sentencepiece_model_pb2.ModelProto.SentencePiece.USER_DEFINED not in types
        and all(first >= second for first, second in itertools.pairwise(scores))
    )


def to_tokenizer_json(processor: Any, folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` of a convertible sentencepiece model into `folder`."""
    import tokenizers
    from tokenizers import decoders, models, normalizers

    pieces = [processor.id_to_piece(i) for i in range(processor.get_piece_size())]
    ids = {piece: i for i, piece in enumerate(pieces)}
    special = [processor.is_control(i) or processor.is_unknown(i) for i in range(len(pieces))]
    mergeable = {piece for i, piece in enumerate(pieces) if not (special[i] or processor.is_byte(i))}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in pieces
        if piece in mergeable
        for cut in range(1, len(piece))
        if piece[:cut] in mergeable and piece[cut:] in mergeable
    ]
    unknown = pieces[processor.unk_id()]
    backend = tokenizers.Tokenizer(models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([piece for piece, is_special in zip(pieces, special) if is_special])
    backend.save(str(folder / "tokenizer.json"))

    roles = {"bos": processor.bos_id(), "eos": processor.eos_id(), "unk": processor.unk_id(), "pad": processor.pad_id()}
    settings = {f"{role}_token": pieces[i] if i >= 0 else None for role, i in roles.items()}
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
