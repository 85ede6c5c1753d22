"""What tests of conversations are made of: texts that look like templates, and messages."""

from hypothesis import strategies as st

# Texts that look like what surrounds them: short ones occur in the template's own words, and in each other.
texts = st.text(max_size=8) | st.sampled_from(
    ["think", "k", "</think>", "<think>", "\n", "assistant", "<|im_end|>", "{{ bos_token }}", "{% generation %}", "☃"]
)
reasonings = texts.filter(lambda text: text.strip())


def user(content="question", **keys):
    return {"role": "user", "content": content, **keys}


def assistant(content="answer", **keys):
    return {"role": "assistant", "content": content, **keys}
