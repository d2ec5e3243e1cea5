#!/usr/bin/env bash
# Runs the console scripts of an installed wheel in an empty folder, as the README shows them.
set -euo pipefail

for name in preprocess train average translate distill backtranslate evaluate score export import \
    serve visualize; do
    "nmt-$name" --help | grep -q "nmt-$name:"
    nmt "$name" --help | grep -q "settings"
done
nmt | grep -q preprocess

nmt-preprocess
nmt-train +model=tiny max_updates=20 checkpoint_every_updates=10 validate_every_updates=10 \
    average_last=2 num_threads=1
nmt-average
printf 'half past three\n\ntwelve euros\n' | nmt-translate num_threads=1 > out.de
test "$(wc -l < out.de)" -eq 3
test -z "$(sed -n 2p out.de)"
nmt translate input=data/prepared/test.src output=test.de beam_size=1 num_threads=1
nmt-evaluate hypotheses=test.de references=data/prepared/test.tgt
nmt-score src=data/prepared/test.src tgt=test.de num_threads=1 > scores
test "$(wc -l < scores)" -eq "$(wc -l < test.de)"
python -c "from nmt import Translator; print(Translator.load('runs/default').translate(['ten']))"
nmt-export format=huggingface output=hf
test -s hf/model.safetensors
! nmt-export format=ctranslate2 output=ct2 2> message
grep -q "pip install nmt\[export\]" message
nmt-visualize what=attention src=ten output=attention.html
nmt-visualize what=report run_dir=runs/default output=report.html
grep -q "export function explore" attention.html report.html
! nmt-visualize what=mask 2> message
grep -q "pip install nmt\[visualize\]" message
! nmt-serve 2> message
grep -q "pip install nmt\[serve\]" message
echo "the wheel works"
