from pathlib import Path

from distill_rl.config.reference import field_documentation, reference
from distill_rl.config.schema import Config
from distill_rl.config.walk import FOREIGN, OUR_KEY, kind_at, leaves, pattern_of

ROOT = Path(__file__).parents[3]


def test_page_in_docs_is_up_to_date():
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    assert page == reference(), "regenerate it: python -m distill_rl.config.reference docs/configuration.md"


def test_every_setting_is_documented_on_the_page():
    page = reference()
    for key, _, _ in leaves(Config):
        row = next(line for line in page.splitlines() if line.startswith(f"| `{pattern_of(key)}` |"))
        cells = row.replace("\\|", "").strip("| ").split(" | ")
        assert len(cells) == 4
        assert len(cells[3]) > 10


def test_every_description_ends_like_a_sentence():
    assert all(text.endswith((".", ")")) for text in field_documentation().values())


def test_every_counterpart_of_a_nemo_rl_key_exists():
    for foreign_key, our_key, remark in FOREIGN:
        assert our_key or remark, f"{foreign_key} has neither a counterpart nor a remark"
        assert not our_key or kind_at(Config, our_key) is not None, our_key
    assert all(kind_at(Config, key) is not None for key in OUR_KEY.values())


def test_important_nemo_rl_keys_are_listed():
    page = reference()
    keys = (
        "use_ipc topk_logits_k use_char_offset use_align_fast use_cuda_dp cross_tokenizer_num_workers force_dp_only "
        "dp_chunk_size max_comb_len projection_matrix_path learnable vocab_topk reverse_kl gold_loss xtoken_loss "
        "dynamic_loss_scaling ce_loss_scale num_prompts_per_step max_num_steps max_num_epochs exact_token_match_only "
        "project_teacher_to_student projection_matrix_multiplier use_sparse_format val_period val_at_start seed "
        "uncommon_topk kl_loss_weight kd_loss_mode sum_weights_metric kl_chunk_shift prefix_bidir_v3_pure_alm data_files"
    )
    assert [key for key in keys.split() if f".{key}`" not in page] == []
