from pathlib import Path

from distill_rl.config.foreign import FOREIGN, OUR_KEY
from distill_rl.config.reference import field_documentation, reference
from distill_rl.config.schema import Config
from distill_rl.config.walk import kind_at, leaves

ROOT = Path(__file__).parents[3]


def test_the_page_in_docs_is_what_the_schema_says():
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    assert page == reference(), "regenerate it: python -m distill_rl.config.reference docs/configuration.md"


def test_every_setting_stands_on_the_page_with_a_meaning():
    page = reference()
    for key, _, _ in leaves(Config):
        row = next(
            line for line in page.splitlines() if line.startswith(f"| `{key.replace('teachers.0.', 'teachers[].')}` |")
        )
        cells = row.replace("\\|", "").strip("| ").split(" | ")
        assert len(cells) == 4
        assert len(cells[3]) > 10


def test_every_documented_string_ends_like_a_sentence():
    assert all(text.endswith((".", ")")) for text in field_documentation().values())


def test_every_key_of_the_nemo_rl_table_exists_here():
    for theirs, ours, remark in FOREIGN:
        assert ours or remark, f"{theirs} says nothing"
        assert not ours or kind_at(Config, ours) is not None, ours
    assert all(kind_at(Config, ours) is not None for ours in OUR_KEY.values())


def test_the_keys_that_a_user_of_nemo_rl_will_look_for_are_there():
    page = reference()
    asked = (
        "use_ipc topk_logits_k use_char_offset use_align_fast use_cuda_dp cross_tokenizer_num_workers force_dp_only "
        "dp_chunk_size max_comb_len projection_matrix_path learnable vocab_topk reverse_kl gold_loss xtoken_loss "
        "dynamic_loss_scaling ce_loss_scale num_prompts_per_step max_num_steps max_num_epochs exact_token_match_only "
        "project_teacher_to_student projection_matrix_multiplier use_sparse_format val_period val_at_start seed "
        "uncommon_topk kl_loss_weight kd_loss_mode sum_weights_metric kl_chunk_shift prefix_bidir_v3_pure_alm data_files"
    )
    assert [key for key in asked.split() if f".{key}`" not in page] == []
