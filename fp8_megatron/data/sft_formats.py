"""Chat templates by the names of Megatron's formats, or from a file. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

from ..errors import UserError

_EACH = "{% for message in messages %}"
_ROLE_IS = "message['role'] =="
_CONTENT = "message['content']"
_QUIET = "replace('/think', '')|replace('/no_think', '')"

#: Megatron's formats by their names in --sft-tokenizer-prompt-format; ``default`` is the tokenizer's own template.
FORMATS = MappingProxyType(
    {
        "identity": f"{_EACH}{{% if {_ROLE_IS} 'assistant' %}}{{% generation %}}{{{{ {_CONTENT} }}}}"
        f"{{% endgeneration %}}{{% else %}}{{{{ {_CONTENT} }}}}{{% endif %}}{{% endfor %}}",
        "nemotron-h-aligned": f"{_EACH}{{% if {_ROLE_IS} 'system' %}}{{{{ '<SPECIAL_10>System\\n' + "
        f"{_CONTENT}|trim + '\\n' }}}}{{% elif {_ROLE_IS} 'user' %}}{{{{ '<SPECIAL_11>User\\n' + {_CONTENT}|trim + "
        f"'\\n<SPECIAL_11>Assistant\\n' }}}}{{% elif {_ROLE_IS} 'assistant' %}}{{% generation %}}"
        f"{{{{ {_CONTENT}|trim + '\\n' }}}}{{% endgeneration %}}{{% endif %}}{{% endfor %}}",
        "nemotron-nano-v2": f"{_EACH}{{% if {_ROLE_IS} 'system' %}}{{{{ '<SPECIAL_10>System\\n' + "
        f"({_CONTENT}|{_QUIET}|trim) + '\\n' }}}}{{% elif {_ROLE_IS} 'user' %}}{{{{ '<SPECIAL_11>User\\n' + "
        f"({_CONTENT}|{_QUIET}|trim) + '\\n' }}}}{{% elif {_ROLE_IS} 'assistant' %}}"
        f"{{{{ '<SPECIAL_11>Assistant\\n' }}}}{{% generation %}}{{{{ {_CONTENT}|trim + '\\n<SPECIAL_12>\\n' }}}}"
        f"{{% endgeneration %}}{{% endif %}}{{% endfor %}}",
    }
)


def template_text(prompt_format: str, file: str | None) -> str | None:
    """The template that --sft-tokenizer-prompt-format or --sft-chat-template names; None: the tokenizer's own.

    Raises:
        UserError: the file cannot be read.
    """
    if file is None:
        return FORMATS.get(prompt_format)
    try:
        return Path(file).read_text(encoding="utf-8-sig")  # a byte order mark would begin each conversation
    except (OSError, ValueError) as error:
        raise UserError(f"--sft-chat-template {file} cannot be read ({error}); give a Jinja template") from error
