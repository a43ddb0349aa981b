"""Chat templates in the ways of well-known families, for what they do that is hard to mask."""

# Thoughts are kept only after the last question, and the last answer gets an empty block of them where it has none.
THINKING = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- set seen = namespace(question=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set seen.question = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or message.role == 'system' %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- set thoughts = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thoughts = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > seen.question and (loop.last or thoughts) %}
            {{- '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- if content or not loop.first %}{{- '\\n' }}{%- endif %}
            {%- set function = call.function or call %}
            {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' + (function.arguments | tojson) + '}' }}
            {{- '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# The prompt of inference opens the thoughts; answers without any do not have the opening.
OPENS_THOUGHTS = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}
    {%- else %}{{- message.content + '<|im_end|>' }}{%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}
"""

# A date line, tools in the first question, and another token behind a call.
DATED = """{{- bos_token + '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + strftime_now('%d %b %Y %f') }}
{%- if messages[0]['role'] == 'system' %}
    {{- '\\n\\n' + messages[0]['content'] | trim }}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- '<|eot_id|>' }}
{%- for message in messages %}
    {%- set role = 'ipython' if message.role == 'tool' else message.role %}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
    {%- if loop.first and tools %}
        {%- if role != 'user' %}{{- raise_exception('tools need a question first') }}{%- endif %}
        {%- for tool in tools %}{{- (tool | tojson) + '\\n' }}{%- endfor %}
    {%- endif %}
    {%- if message.tool_calls %}
        {%- set function = message.tool_calls[0].function %}
        {{- '{"name": "' + function.name + '", "parameters": ' + (function.arguments | tojson) + '}<|end_of_text|>' }}
    {%- elif role == 'ipython' %}
        {{- (message.content | tojson) + '<|eot_id|>' }}
    {%- else %}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
TEXT_END = (
    "{% for m in messages %}{{ '## ' + m['role'] + '\n' + m['content'] + '\n##\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '## assistant\n' }}{% endif %}"
)
