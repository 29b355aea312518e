# The front door. Recipes that take more than a line live in xtask: `cargo xtask --help`.
.PHONY: demo test test-engines check-all vm bench inputs oracle fmt install clean
PREFIX ?= /usr/local

demo:         ; cargo xtask demo
test:         ; cargo xtask test
test-engines: ; cargo xtask test engines
check-all:    ; cargo xtask check-all
vm:           ; cargo xtask vm newest
bench:        ; cargo xtask bench all
inputs:       ; cargo xtask inputs
oracle:       ; cargo xtask oracle mkcomposefs
fmt:          ; cargo fmt --all
install:      ; cargo xtask install --prefix $(PREFIX)
clean:        ; cargo clean
