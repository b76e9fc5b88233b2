@pytest.mark.parametrize(
    ("architecture", "kind", "section", "interleaved"),
    [
        ("Qwen2VLForConditionalGeneration", "qwen2_vl_text", [16, 24, 24], False),
        ("Qwen3VLForConditionalGeneration", "qwen3_vl_text", [24, 20, 20], True),
        ("Qwen3_5ForConditionalGeneration", "qwen3_5_text", [11, 11, 10], True),
    ],
)
def test_axes_of_rotary_positions_are_those_of_the_family(
    architecture: str, kind: str, section: list[int], interleaved: bool
) -> None:
    def rope(**text: Any) -> Any:
        return text_model({"architectures": [architecture], "text_config": {"model_type": kind, **text}})

    assert rope()["rope_scaling"] == {"mrope_section": section, "mrope_interleaved": interleaved}
    own = {"type": "mrope", "mrope_section": [1, 2, 3], "mrope_interleaved": not interleaved}
    expected = {"type": "default", "mrope_section": [1, 2, 3], "mrope_interleaved": interleaved}
    assert rope(rope_scaling=own)["rope_scaling"] == expected
