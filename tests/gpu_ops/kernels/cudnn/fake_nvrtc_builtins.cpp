// What the compiler brings along; that it can be loaded is all there is to it.
extern "C" int nvrtc_builtins_of_a_fake() { return 0; }
